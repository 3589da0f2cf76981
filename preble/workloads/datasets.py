"""Reads the public data sets of the evaluation as their authors publish them, and prompts that are kept as segments.
Owns how a record becomes a prompt.

ToolBench queries, LooGLE documents, NExT-QA videos, ALFWorld action logs, APPS problems. What all requests of a group
share is a part of its own and comes first; instructions are worded here, the data sets' own prompts are not copied.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .files import Collector, Row, csv_rows, json_list, json_rows, numbered_lines
from .types import Int32Array

TOOL_SYSTEM = "Serve the user's request by calling the tools described below. Answer with one call as JSON.\n\nTools:\n"
DOCUMENT_SYSTEM = "Read the document and answer the question about it.\n\n"
VIDEO_SYSTEM = "Watch the video and choose the right answer to the question.\n"
HOUSE_SYSTEM = "Interact with a household to solve a task.\n"
PROGRAM_SYSTEM = "Write a Python program that solves the problem.\n\n"
FRAMES_PER_SECOND = 30  # a second of video is one frame of 256 tokens, as in the evaluation
TOKENS_PER_FRAME = 256
NEXTQA_COLUMNS = ("video", "frame_count", "question", "answer", "a0", "a1", "a2", "a3", "a4")
API_FIELDS = ("api_name", "api_description", "required_parameters", "optional_parameters", "method")
ROOM = "You are in the middle of a room"
# "> go to desk 1" in prompts and logs, "Act 1: go to desk 1" in what ReAct prints.
ACTION = re.compile(r"(?:Act \d+: ?(?:> ?)?|> ?)(.*)")
OBSERVATION = re.compile(r"Obs \d+: ?")


def read_toolbench(into: Collector) -> None:
    """ToolBench's query files: a JSON list (or lines) of `query`, `api_list`, `query_id`. Group: the first tool.

    They hold no answers, so output lengths are drawn from Table 1.
    """
    rows = json_list(into.path) if starts_with(into.path, "[") else json_rows(into.path)
    for row in into.until_full(rows):
        tools = [tool_text(row, api) for api in row.items("api_list")]
        request_id = row.text("query_id") if "query_id" in row.values else str(row.line)
        parts = [
            into.encode(TOOL_SYSTEM),
            into.encode("".join(tools)),
            into.encode(f"\nRequest: {row.text('query')}\n"),
        ]
        group = str(row.items("api_list")[0].get("tool_name"))
        into.add(row, request_id, [into.bos, *parts], into.output("toolbench", request_id, None), group=group)


def tool_text(row: Row, api: Any) -> str:
    """One API as the prompt describes it: its fields in a fixed order, without the recorded example response."""
    if not isinstance(api, dict) or "tool_name" not in api or "api_name" not in api:
        raise row.wrong(f"an entry of 'api_list' must have 'tool_name' and 'api_name', got {api!r:.80}")
    kept = {name: api[name] for name in API_FIELDS if name in api}
    return f"{api['tool_name']}: {json.dumps(kept, ensure_ascii=False, separators=(',', ':'))}\n"


def read_loogle(into: Collector) -> None:
    """LooGLE's jsonl: a document a line with `input` and `qa_pairs`, or a question a line with `context`, `question`.

    Group: the document's title. Where `qa_pairs` is "none" the task is a summary and `output` is its text.
    """
    for row in json_rows(into.path):
        document = row.text("context" if "context" in row.values else "input")
        group = row.text("title") if "title" in row.values else f"line {row.line}"
        for number, (question, answer) in enumerate(questions(row)):
            if into.full:
                return
            request_id = f"{row.line}.{number}"
            asked = into.encode(f"\nQuestion: {question}\nAnswer: ")
            into.add(
                row,
                request_id,
                [into.bos, into.encode(DOCUMENT_SYSTEM), into.encode(document), asked],
                into.output("loogle", request_id, answer),
                group=group,
            )


def questions(row: Row) -> Iterator[tuple[str, str]]:
    """(question, answer) of a LooGLE line."""
    if "qa_pairs" not in row.values:
        yield row.text("question"), row.text("answer")
        return
    pairs = row.values["qa_pairs"]
    if pairs == "none":
        yield "What is a summary of the document?", row.text("output")
        return
    if isinstance(pairs, str):
        pairs = literal(row, "qa_pairs", pairs)
    for pair in replace(row, values={"qa_pairs": pairs}).items("qa_pairs"):
        if not isinstance(pair, dict):
            raise row.wrong(f"an entry of 'qa_pairs' must have 'Q' and 'A', got {pair!r:.80}")
        one = replace(row, values=pair)
        yield one.text("Q"), answer_text(one)


def answer_text(pair: Row) -> str:
    """The answer of a question; a cloze's is an object, read as JSON."""
    answer = pair.values.get("A")
    if not isinstance(answer, dict):
        return pair.text("A")
    try:
        return json.dumps(answer, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a Python literal may hold what JSON has not
        raise pair.wrong(f"'A' cannot be written as JSON: {answer!r:.80}") from None


def literal(row: Row, name: str, text: str) -> Any:
    """A value that was written into a text, as JSON or as Python."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    raise row.wrong(f"{name!r} is neither a list nor the text of one")


def read_nextqa(into: Collector) -> None:
    """NExT-QA's csv: `video`, `frame_count`, `question`, `a0` to `a4`, `answer` (which of them). Group: the video.

    The video is a run of one token id of its own: 256 tokens for each second at 30 frames a second.
    """
    for row in into.until_full(csv_rows(into.path, NEXTQA_COLUMNS)):
        choice = row.integer("answer", 0)
        if choice > 4:
            raise row.wrong(f"'answer' must be 0 to 4, got {choice}")
        video = row.text("video")
        tokens = max(1, row.integer("frame_count", 1) * TOKENS_PER_FRAME // FRAMES_PER_SECOND)
        asked = " ".join(row.text(name) for name in ("question", "a0", "a1", "a2", "a3", "a4"))
        request_id = f"{video}.{row.line}"
        into.add(
            row,
            request_id,
            [into.bos, into.encode(VIDEO_SYSTEM), into.pseudo(row, video, tokens), into.encode(asked)],
            into.output("videoqa", request_id, row.text(f"a{choice}")),
            group=video,
        )


def read_alfworld(into: Collector) -> None:
    """ALFWorld logs: jsonl with the log in `traj` (KnowAgent), or plain text of logs one after another (ReAct).

    Each action line is one request whose prompt is the task and all steps before, sent after the one before it has
    finished; the action is its output. Group: the trajectory. Lines before the first room of a text are its preface
    and passed over; a log without any action is refused.
    """
    for number, (row, log) in enumerate(into.until_full(logs(into.path))):
        read_log(into, row, log, f"t{number:04d}")


def logs(path: Path) -> Iterator[tuple[Row, str]]:
    """The logs of a file, each with where it starts."""
    if starts_with(path, "{"):
        for row in json_rows(path):
            yield row, row.text("traj")
        return
    start = 0
    lines: list[str] = []
    for number, line in numbered_lines(path):
        if line.startswith(ROOM):
            if lines:
                yield Row(path, start, {}), "\n".join(lines)
            start, lines = number, [line]
        elif lines:
            lines.append(line)
    if not lines:
        raise InvalidInput(f"{path}, line 1: no line starts with {ROOM!r}")
    yield Row(path, start, {}), "\n".join(lines)


def read_log(into: Collector, row: Row, log: str, group: str) -> None:
    task, steps = split_log(log)
    if not steps:
        raise row.wrong("the log has no action (a line that starts with '>' or 'Act 1:')")
    parts: list[Int32Array] = [into.bos, into.encode(f"{HOUSE_SYSTEM}{task}\n>")]
    after = None
    for turn, (action, observation) in enumerate(into.until_full(steps)):
        request_id = f"{group}.{turn:03d}"
        into.add(row, request_id, parts, into.output("embodied", request_id, f" {action}"), group=group, after=after)
        seen = f"{observation}\n" if observation else ""
        parts = [*parts, into.encode(f" {action}\n{seen}>")]
        after = request_id


def split_log(log: str) -> tuple[str, list[tuple[str, str]]]:
    """(task, steps of (action, observation)) of a log. An observation is all lines up to the next action."""
    task: list[str] = []
    steps: list[tuple[str, list[str]]] = []
    for line in log.strip().splitlines():
        action = ACTION.fullmatch(line)
        if action:
            steps.append((action[1], []))
        else:
            (steps[-1][1] if steps else task).append(OBSERVATION.sub("", line))
    return "\n".join(task), [(action, "\n".join(seen)) for action, seen in steps]


def read_apps(into: Collector) -> None:
    """APPS: folders with `question.txt` and `solutions.json`, or jsonl with `question` and `solutions` (a JSON text).

    Group: the problem. The output is the first solution; without one its length is drawn from Table 1.
    """
    for row in into.until_full(apps_folders(into.path) if into.path.is_dir() else json_rows(into.path)):
        found = row.values.get("solutions") or []
        solutions = literal(row, "solutions", found) if isinstance(found, str) else found
        if not isinstance(solutions, list) or not all(isinstance(text, str) for text in solutions):
            raise row.wrong("'solutions' must be a list of texts")
        problem = next((row.text(n) for n in ("problem_id", "id") if n in row.values), str(row.line))
        parts = [into.bos, into.encode(PROGRAM_SYSTEM), into.encode(f"{row.text('question')}\n\nProgram:\n")]
        output = into.output("programming", problem, solutions[0] if solutions else None)
        into.add(row, problem, parts, output, group=problem)


def apps_folders(root: Path) -> Iterator[Row]:
    """The problems below a folder, in the order of their paths; a problem without `solutions.json` has none."""
    for question in sorted(root.rglob("question.txt")):
        solutions = question.with_name("solutions.json")
        text = "\n".join(line for _, line in numbered_lines(question))
        answers = "\n".join(line for _, line in numbered_lines(solutions)) if solutions.exists() else ""
        name = question.parent.relative_to(root).as_posix()
        yield Row(question, 1, {"problem_id": name, "question": text, "solutions": answers})


def starts_with(path: Path, sign: str) -> bool:
    """True if the first line that is not empty starts with `sign`."""
    first = next((line for _, line in numbered_lines(path) if line.strip()), "")
    return first.lstrip().startswith(sign)


# --- segments ---------------------------------------------------------------------------------------------------------


def read_segmented(into: Collector) -> None:
    """Read `NAME.jsonl.gz` of requests beside `NAME_segments.jsonl.gz` of what they share.

    A request line has `id`, `group`, `parts` (`{"seg": id}` or `{"text": s}` in prompt order), `output_tokens`,
    `output_tokens_t1`, `output_kind`, `output_text`, `after`; a segment line `id` and `text` or `pseudo`. One BOS leads
    each prompt; each part is tokenised on its own.
    """
    segments = {row.text("id"): row for row in json_rows(segments_path(into.path))}
    for row in into.until_full(json_rows(into.path)):
        parts = [into.bos, *(part_ids(into, row, part, segments) for part in row.items("parts"))]
        after = None if row.values.get("after") is None else row.text("after")
        into.add(row, row.text("id"), parts, output_of(into, row), group=row.text("group"), after=after)


def segments_path(path: Path) -> Path:
    """The sibling that holds the segments, zipped or not. Raises `InvalidInput` where there is none."""
    name = path.name.split(".jsonl")[0] + "_segments.jsonl"
    for candidate in (path.with_name(f"{name}.gz"), path.with_name(name)):
        if candidate.exists():
            return candidate
    raise InvalidInput(f"path: {path} needs {name}.gz or {name} beside it")


def part_ids(into: Collector, row: Row, part: Any, segments: dict[str, Row]) -> Int32Array:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return into.encode(part["text"])
    if not isinstance(part, dict) or not isinstance(part.get("seg"), str):
        raise row.wrong(f"a part must have 'seg' or 'text', got {part!r:.80}")
    segment = segments.get(part["seg"])
    if segment is None:
        raise row.wrong(f"no segment {part['seg']!r} in {segments_path(into.path).name}")
    if "pseudo" in segment.values:
        return into.pseudo(segment, segment.text("id"), segment.integer("n_tokens", 1))
    return into.encode(segment.text("text"))


def output_of(into: Collector, row: Row) -> tuple[int, Int32Array | None]:
    """(length, ids) of the answer: of the real text where it is one, as drawn in the file where not."""
    if into.outputs == "table1":
        return row.integer("output_tokens_t1", 1), None
    if row.values.get("output_kind") == "real":
        return into.output("", row.text("id"), row.text("output_text"))
    return row.integer("output_tokens", 1), None

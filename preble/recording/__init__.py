"""Traffic on record: what came, where it went and what became of it, without a word of it. Owns the public names only.

    recorded.py   the data: a `Recording` of requests and workers
    names.py      blocks of token ids become keyed hashes
    frames.py     the file: frames with checksums, cut or damaged ones
    lines.py      what is in a frame; a recording as frames and back
    recording.py  `Recording`, with all of it
    writer.py     files that grow, bounded and rotated, beside the requests
    replaying.py  a recording as a workload of invented token ids

docs/what-if.md is the operator's page.
"""

from .recorded import RecordedRequest as RecordedRequest
from .recorded import RecordedWorker as RecordedWorker
from .recording import Recording as Recording
from .writer import EndedRequest as EndedRequest
from .writer import RecordingWriter as RecordingWriter

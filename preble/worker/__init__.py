"""`preble worker`: one engine served to routers, as a process.

`process` is the process and its command line, `engine_thread` drives the engine, `engine_options` says which engine.
"""

from .process import Worker as Worker
from .process import WorkerConfig as WorkerConfig
from .process import add_arguments as add_arguments
from .process import run as run
from .process import serve as serve

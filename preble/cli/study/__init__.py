"""`preble study`: the paper's study of prompts (section 3) on any workload. See its modules.

`statistics` measures, `report` and `plot` show it, `program` reads files and calls them.
"""

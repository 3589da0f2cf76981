"""`preble simulate`; all of it is in `program.py`."""

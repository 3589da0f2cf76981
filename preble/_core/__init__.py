"""C without Python: atomics, the writer lock, readers' epochs, slabs, comparing token runs, token ids, a MessagePack
reader. And keys of dictionaries that run no Python.

Owns what the compiled modules above are made of; none of it decides anything. Its clock is the one that tests set.
"""

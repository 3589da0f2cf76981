"""C without Python, but for keys of dictionaries: atomics, the writer lock, readers' epochs, slabs, comparing token runs, token ids, a MessagePack
reader.

Owns what the compiled modules above are made of; none of it decides anything. Its clock is the one that tests set.
"""

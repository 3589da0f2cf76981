"""`preble audit`: what running servers compute twice, and what E2 would have saved. `listening` follows the servers,
`ledger` knows what is cached where, `requests` makes requests of it and `traffic` a recording of these, `what_if`
replays, `findings` has the figures, `report` and `plot` say them.
"""

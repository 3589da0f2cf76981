"""`preble demo`: real prompts through real worker processes, round robin against E2. See its modules.

`corpus` makes prompts, `fleet` runs workers, `experiment` sends, `plan` sets the rate, `report` and `plot` show the
results.
"""

"""`preble profile`: how long an engine takes, as figures and as a cost model. See its modules.

`points` says what is measured, `targets` run an engine step by step, `bench` measures, `parts` splits a torch prefill
into attention and linear layers, `profile` fits and judges, `plot` draws, `program` conducts. Paper section 2.1.
"""

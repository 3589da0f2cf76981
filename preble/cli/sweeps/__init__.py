"""What `preble simulate` makes of several runs. `statistics` gives intervals over seeds, `settings` reads KEY=VALUE,
`requests_file` writes a row a request, `plot` draws.
"""

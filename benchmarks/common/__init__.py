"""What every benchmark needs: places, facts of a run, tables."""

"""Worker processes: started, watched, restarted, drained and logged."""

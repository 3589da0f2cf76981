"""Worker processes: started, supervised, restarted, drained and logged."""

"""What the way from router to worker costs."""

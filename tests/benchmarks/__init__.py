"""The benchmarks' own logic. No time is judged here."""

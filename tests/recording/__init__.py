"""Recordings of traffic: their names, their files, their writer, and `preble serve --record`."""

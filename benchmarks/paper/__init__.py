"""The paper's evaluation in simulation, and the contest of policies."""

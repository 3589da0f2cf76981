"""What tests share: places, processes, networks, small workloads. No test is in here."""

"""What `GlobalScheduler` conducts beside the decision: leases, membership, rebalancing, records, calibration."""

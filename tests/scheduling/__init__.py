"""What works beside the decision: leases, membership, rebalancing, records."""

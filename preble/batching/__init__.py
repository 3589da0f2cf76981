"""What `LocalScheduler` conducts: requests, the waiting queue, the KV cache and its slots, batches."""

"""What every endpoint of the gateway uses: the gateway's state, configuration, metrics, tracing, logs, errors."""

"""The engine: requests, scheduler, batches, executors and the loop that joins them."""

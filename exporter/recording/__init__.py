"""Stats and events of the training process: recording, aggregation and delivery to handlers.

Importing its modules needs only the standard library.
"""

"""Machines as data: a cluster described, ranks placed on it, a schedule's time on it predicted."""

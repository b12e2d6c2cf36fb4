"""Follow a job: the lines of all hosts in order and once, a live panel, the reason of a failure,
the cost.
"""

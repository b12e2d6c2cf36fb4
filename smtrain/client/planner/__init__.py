"""The planner: whether a run fits, how long it takes, what it costs, and what would be better
(`smtrain.plan`).
"""

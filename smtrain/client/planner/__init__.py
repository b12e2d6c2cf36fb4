"""The planner: whether a run fits, its time and cost, and what would be better
(`smtrain.plan`).
"""

"""`smtrain doctor`: this machine, and how well it trains."""

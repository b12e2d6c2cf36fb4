"""Where jobs run, whatever it is: what everything above asks of it, and which one a config or a name means."""

"""Several ranks: the process group and its collectives, the watchdog, how a process reports its end."""

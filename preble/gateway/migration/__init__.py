"""From another router's command line to the gateway's configuration. `counterparts` owns what each of their options is
here, `translation` how a command line is read; nothing of theirs is imported."""

"""The keeper of MPS control daemons: a process apart from the plugin, since a daemon that dies takes its clients along."""

"""What generators and services both need of Redis: keys, scripts, replies, connections, runs."""

#!/bin/sh
# Starts redis-server as its own user, with the users of users.acl; arguments are those of redis-server.
# /secrets has a folder for each user, which only the service of that user mounts too.
set -eu
sh "$(dirname "$0")/users.sh" /secrets /tmp/users.acl
# The services run as 1000.
chown -R 1000:1000 /secrets/*
chown redis:redis /tmp/users.acl /data
exec setpriv --reuid=redis --regid=redis --clear-groups \
  redis-server --bind '*' --dir /data --aclfile /tmp/users.acl "$@"

#!/bin/sh
# Writes the file of users for redis-server: users.acl with the hash of a password for each user.
#
#   users.sh SECRETS ACLFILE
#
# The password of a user lies in SECRETS/<user>/password. It is made at the first start, of 256 random bits, and
# kept. Delete it and start again to replace it.
set -eu
umask 077
secrets=$1 aclfile=$2
users=$(dirname "$0")/users.acl

password_of() {
  file=$secrets/$1/password
  if [ ! -s "$file" ]; then
    mkdir -p "$secrets/$1"
    od -An -vN32 -tx1 /dev/urandom | tr -d ' \n' >"$file.draft"
    mv "$file.draft" "$file"
  fi
  cat "$file"
}

# Without -r: a line that ends in \ is continued by the next one.
while read word name rules; do
  [ "$word" = user ] || continue
  if [ "$name" = default ]; then
    echo "user default $rules"
  else
    hash=$(password_of "$name" | sha256sum)
    echo "user $name on #${hash%% *} $rules"
  fi
done <"$users" >"$aclfile"

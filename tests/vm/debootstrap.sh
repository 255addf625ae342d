#!/bin/sh
# debootstrap.sh DIRECTORY PACKAGE...: a Debian trixie tree, from the mirror, and through the proxy, that this machine's own
# apt uses. A machine without Debian sources gets mmdebstrap's default mirror.
set -eu
directory=$1
shift
packages=$(IFS=,; echo "$*")

sources() {
  apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | sort -u | while IFS='|' read -r label uri; do
    case $label in
    Debian) printf 'deb %s trixie main\ndeb %s trixie-updates main\n' "$uri" "$uri" ;;
    Debian-Security) printf 'deb %s trixie-security main\n' "$uri" ;;
    esac
  done
}

proxies() {
  apt-config dump 2>/dev/null | grep -iE '^Acquire::https?::Proxy' || true
}

options=$(mktemp)
trap 'rm -f "$options"' EXIT
proxies >"$options"
lines=$(sources)
set --
[ -z "$lines" ] || set -- -
printf '%s\n' "$lines" | mmdebstrap --quiet --variant=essential --include="$packages" --aptopt="$options" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  trixie "$directory" "$@"

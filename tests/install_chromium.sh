#!/usr/bin/env bash
# Unpack Debian's headless Chromium and the libraries that this machine lacks into a directory. Needs apt, but no root.
set -euo pipefail
target=$1
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
packages=$(apt-get install --simulate --no-install-recommends chromium-headless-shell | awk '/^Inst/ {print $2}')
mkdir "$new/archives" "$new/chromium"
(cd "$new/archives" && apt-get download -qq ${packages:-chromium-headless-shell})
for archive in "$new"/archives/*.deb; do
    dpkg-deb --extract "$archive" "$new/chromium"
done
cat > "$new/chromium/chromium" <<'SCRIPT'
#!/bin/sh
lib=$(dirname "$(realpath "$0")")/usr/lib
for directory in "$lib"/*-linux-gnu "$lib"/*-linux-gnu/pulseaudio; do
    LD_LIBRARY_PATH="$directory${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
export LD_LIBRARY_PATH
exec "$lib/chromium/chromium-headless-shell" "$@"
SCRIPT
chmod +x "$new/chromium/chromium"
"$new/chromium/chromium" --version
rm -rf "$target"
mv "$new/chromium" "$target"

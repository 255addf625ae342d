#!/bin/bash
# Build the kernel modules of the virtual HGX board and take the kernel that they are for.
#
#     build_modules.sh OUT            (root; a second run does only what changed)
#
# OUT/toolbox   a Debian chroot with kernel image, headers and compiler, installed in one run so that versions agree
# OUT/kernel    vmlinuz, release, modules/ (the whole /lib/modules/<release>)
# OUT/programs  what else is compiled: the agent, and one launcher for each program that is written in Python
# OUT/modules   fake_hgx.ko, nvidia_dep.ko, selftest, and nvidia.ko in its variants:
#   nvidia.ko                   580.126.09, not signed; also .zst .xz .gz
#   nvidia-other.ko             580.159.03: a later release of the same module
#   nvidia-older.ko             580.105.08: an earlier one
#   nvidia-signed.ko            signed with a key that the kernel does not know
#   nvidia-needs-dep.ko         depends on nvidia_dep.ko: "Unknown symbol" unless that is loaded
#   nvidia-vermagic.ko          for a kernel of another kind: "version magic ... should be ..."
#   nvidia-modversions.ko       other checksum of module_layout: "disagrees about version of symbol module_layout"
#   nvidia-symbol-version.ko    other checksum of one more symbol: "disagrees about version of symbol ..."
#   nvidia-damaged.ko           cut in the middle
#   nvidia-badsignature.ko      the signature block is damaged
# No version is pinned: the kernel is the newest that Debian has on the day the toolbox is made.
set -euo pipefail

PACKAGES="linux-image-cloud-amd64 linux-headers-cloud-amd64 gcc libc6-dev make kmod xz-utils zstd openssl"
VERSION=580.126.09
OTHER_VERSION=580.159.03
OLDER_VERSION=580.105.08

[ $# = 1 ] || { echo "usage: $0 OUT" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "$0: must be root" >&2; exit 1; }
here=$(dirname "$(readlink -f "$0")")
mkdir -p "$1"
out=$(readlink -f "$1")
toolbox=$out/toolbox

# Is the result of step $1 there, made from the same text $2?
is_fresh() { [ "$(cat "$out/.$1.stamp" 2>/dev/null)" = "$2" ]; }
set_fresh() { echo "$2" >"$out/.$1.stamp"; }

make_toolbox() {
  is_fresh toolbox "$PACKAGES" && return
  echo "making the toolbox chroot"
  rm -rf "$toolbox" "$out"/.{toolbox,kernel,modules}.stamp
  # shellcheck disable=SC2086
  "$here/debootstrap.sh" "$toolbox" $PACKAGES
  set_fresh toolbox "$PACKAGES"
}

take_kernel() {
  local release
  release=$(kernel_release)
  is_fresh kernel "$release" && return
  rm -rf "$out/kernel"
  mkdir -p "$out/kernel"
  cp "$toolbox/boot/vmlinuz-$release" "$out/kernel/vmlinuz"
  cp -a "$toolbox/usr/lib/modules/$release" "$out/kernel/modules"
  rm -f "$out/kernel/modules/build" "$out/kernel/modules/source"
  echo "$release" >"$out/kernel/release"
  set_fresh kernel "$release"
}

# The release that has both an image and headers.
kernel_release() {
  local image
  for image in "$toolbox"/boot/vmlinuz-*; do
    [ ! -d "$toolbox/usr/src/linux-headers-${image##*/vmlinuz-}" ] || { echo "${image##*/vmlinuz-}"; return; }
  done
  echo "$0: no kernel image with headers in the toolbox" >&2
  return 1
}

# compile [C OPTIONS]: the modules in /build/source of the toolbox; what does not depend on the options stays.
compile() {
  chroot "$toolbox" make --silent -j2 -C "/usr/src/linux-headers-$(cat "$out/kernel/release")" M=/build/source \
    KCFLAGS=-Werror BED_VARIANT="$*" modules
}

# take NAME AS: one compiled module without its debug information.
take() { chroot "$toolbox" strip --strip-debug -o "/build/modules/$2.ko" "/build/source/$1.ko"; }

compile_all() {
  rm -rf "$toolbox/build"
  mkdir -p "$toolbox"/build/{source,modules,programs}
  cp "$here"/kernel/* "$here"/programs/* "$toolbox/build/source/"
  compile -DSTUB_VERSION=$VERSION
  take fake_hgx fake_hgx
  take nvidia_dep nvidia_dep
  take nvidia nvidia
  compile -DSTUB_VERSION=$OTHER_VERSION
  take nvidia nvidia-other
  compile -DSTUB_VERSION=$OLDER_VERSION
  take nvidia nvidia-older
  compile -DSTUB_VERSION=$VERSION -DSTUB_NEEDS_DEP
  take nvidia nvidia-needs-dep
  chroot "$toolbox" gcc -O1 -Wall -Wextra -Werror -static -o /build/modules/selftest /build/source/selftest.c
}

compile_programs() {
  local program
  chroot "$toolbox" gcc -O1 -Wall -Wextra -Werror -static -o /build/programs/agent /build/source/agent.c
  for program in fmsupervisor nv-fabricmanager supervisord; do
    chroot "$toolbox" gcc -O1 -Wall -Wextra -Werror "-DPROGRAM=$program" -o "/build/programs/$program" /build/source/launcher.c
  done
}

# replace_section FILE SECTION EDIT...: pass one ELF section of FILE (in the toolbox) through the filter EDIT.
replace_section() {
  local file=$1 section=$2
  shift 2
  chroot "$toolbox" objcopy -O binary --only-section="$section" "$file" /build/section
  LC_ALL=C "$@" <"$toolbox/build/section" >"$toolbox/build/section.new"
  chroot "$toolbox" objcopy --update-section "$section=/build/section.new" "$file"
}

# An entry of __versions is 64 bytes: a checksum of 8 and the symbol's name. Changes the one of the symbol $1.
change_checksum() {
  perl -0777 -pe "s/.{8}(?=\Q$1\E\0)/\x01\x02\x03\x04\0\0\0\0/s or die 'no such symbol'"
}

sign() {
  chroot "$toolbox" sh -euc '
    openssl req -new -x509 -newkey rsa:2048 -nodes -days 3650 -subj "/CN=unknown to the kernel" \
      -keyout /build/key.pem -out /build/certificate.pem 2>/dev/null
    for tool in /usr/src/linux-headers-"$1"/scripts/sign-file /usr/lib/linux-kbuild-*/scripts/sign-file; do
      [ -x "$tool" ] && exec "$tool" sha256 /build/key.pem /build/certificate.pem "$2" "$3"
    done
    echo "no sign-file in the headers" >&2; exit 1' sh "$(cat "$out/kernel/release")" "$1" "$2"
}

make_variants() {
  cd "$toolbox/build/modules"
  zstd --quiet -19 -k nvidia.ko
  xz --check=crc32 --lzma2=dict=1MiB -k nvidia.ko
  gzip --no-name -k nvidia.ko
  sign /build/modules/nvidia.ko /build/modules/nvidia-signed.ko
  local name
  for name in vermagic modversions symbol-version; do cp nvidia.ko "nvidia-$name.ko"; done
  replace_section /build/modules/nvidia-vermagic.ko .modinfo \
    sed -E 's/vermagic=[^ ]+ SMP (preempt )?/vermagic=5.14.21-150500.55-rt SMP preempt_rt /'
  replace_section /build/modules/nvidia-modversions.ko __versions change_checksum module_layout
  replace_section /build/modules/nvidia-symbol-version.ko __versions change_checksum __pci_register_driver
  head -c "$(($(stat -c %s nvidia.ko) / 2))" nvidia.ko >nvidia-damaged.ko
  # The block before the closing marker of 28 bytes is 12 bytes whose last four are the signature's length.
  cp nvidia-signed.ko nvidia-badsignature.ko
  printf '\177\377\377\377' |
    dd of=nvidia-badsignature.ko bs=1 seek="$(($(stat -c %s nvidia-badsignature.ko) - 32))" conv=notrunc status=none
  cd - >/dev/null
}

make_modules() {
  local wanted
  wanted=$(cat "$out/kernel/release" "$here"/kernel/* "$here"/programs/* "$here/build_modules.sh" | sha256sum)
  is_fresh modules "$wanted" && return
  echo "compiling the modules for $(cat "$out/kernel/release")"
  compile_all
  compile_programs
  make_variants
  rm -rf "$out"/{modules,programs}
  cp -a "$toolbox"/build/{modules,programs} "$out/"
  set_fresh modules "$wanted"
}

exec 9>"$out/.modules.lock"
flock 9
make_toolbox
take_kernel
make_modules

#!/bin/bash
# Build what the virtual machine boots: OUT/image.erofs, OUT/initrd. As root, after build_modules.sh OUT.
#
#     build_image.sh OUT [root]     (a second run does only what changed; "root": only OUT/root, which needs no kernel)
#
# OUT/root         Debian trixie: systemd, udev, kmod, pciutils; no Python
# OUT/image.erofs  the same with the kernel's modules, our agent, and everything masked that only costs time at boot
# OUT/initrd       the DMAR table, then busybox, the few modules that mount the image, and guest/init
set -euo pipefail

PACKAGES="systemd systemd-sysv udev dbus kmod pciutils procps zstd"
INITRD_MODULES="virtio_blk virtio_net erofs overlay"
MASKED="
  apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer systemd-tmpfiles-clean.timer
  dev-hugepages.mount dev-mqueue.mount sys-fs-fuse-connections.mount sys-kernel-config.mount sys-kernel-tracing.mount
  modprobe@configfs.service modprobe@drm.service modprobe@efi_pstore.service modprobe@fuse.service
  getty@tty1.service serial-getty@ttyS0.service console-getty.service getty.target
  systemd-binfmt.service systemd-firstboot.service systemd-hwdb-update.service systemd-journal-catalog-update.service
  systemd-logind.service systemd-machine-id-commit.service systemd-network-generator.service systemd-networkd.service
  systemd-pcrmachine.service systemd-pcrphase.service systemd-pstore.service systemd-random-seed.service
  systemd-sysusers.service systemd-timesyncd.service systemd-update-done.service systemd-update-utmp.service
  systemd-user-sessions.service keyboard-setup.service console-setup.service
"

[ $# = 1 ] || [ "$*" = "$1 root" ] || { echo "usage: $0 OUT [root]" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "$0: must be root" >&2; exit 1; }
here=$(dirname "$(readlink -f "$0")")
out=$(readlink -f "$1")

# Is the result of step $1 there, made from the same text $2?
is_fresh() { [ "$(cat "$out/.$1.stamp" 2>/dev/null)" = "$2" ]; }
set_fresh() { echo "$2" >"$out/.$1.stamp"; }

make_root() {
  is_fresh root "$PACKAGES" && return
  echo "making the root file system"
  rm -rf "$out/root" "$out/.image.stamp"
  # shellcheck disable=SC2086
  "$here/debootstrap.sh" "$out/root" $PACKAGES
  set_fresh root "$PACKAGES"
}

make_tree() {
  local tree=$1 release=$2 unit
  cp -a "$out/root/." "$tree/"
  rm -rf "$tree"/boot/* "$tree"/var/lib/{apt,dpkg} "$tree"/var/cache/* "$tree"/usr/share/{doc,man,locale,zoneinfo}
  mkdir -p "$tree/usr/lib/modules" "$tree/etc/systemd/system/multi-user.target.wants" "$tree/etc/systemd/journald.conf.d"
  cp -a "$out/kernel/modules" "$tree/usr/lib/modules/$release"
  for unit in $MASKED; do ln -sf /dev/null "$tree/etc/systemd/system/$unit"; done
  echo 5f6d7376a0c14bd2a1f70d2e64b0a3c5 >"$tree/etc/machine-id"
  echo hgx >"$tree/etc/hostname"
  : >"$tree/etc/fstab"
  touch "$tree/etc/.updated" "$tree/var/.updated"
  install -D -m 644 "$here/guest/trigger.conf" "$tree/etc/systemd/system/systemd-udev-trigger.service.d/test.conf"
  install -m 755 "$out/programs/agent" "$tree/usr/lib/agent"
  install -m 644 "$here/guest/agent.service" "$tree/usr/lib/systemd/system/agent.service"
  ln -s /usr/lib/systemd/system/agent.service "$tree/etc/systemd/system/multi-user.target.wants/agent.service"
  install -m 644 "$here/guest/journald.conf" "$tree/etc/systemd/journald.conf.d/test.conf"
  # The simulated nv-fabricmanager looks for its behaviour upwards from itself; what a boot must forget is in memory.
  ln -s /usr/local/simulator "$tree/.simulator"
  install -m 644 "$here/guest/simulator.conf" "$tree/usr/lib/tmpfiles.d/simulator.conf"
}

make_initrd() {
  local tree=$1 release=$2 initrd=$3 module path
  mkdir -p "$initrd"/{bin,modules} "$initrd-acpi/kernel/firmware/acpi"
  cp "$(command -v busybox)" "$initrd/bin/busybox"
  install -m 755 "$here/guest/init" "$initrd/init"
  for module in $INITRD_MODULES; do modprobe -d "$tree" -S "$release" --show-depends "$module"; done |
    awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    case $path in
    *.xz) xz -dc "$path" ;;
    *.zst) zstd -dcq "$path" ;;
    *.gz) gzip -dc "$path" ;;
    *) cat "$path" ;;
    esac >"$initrd/modules/$(basename "${path%%.ko*}").ko"
    echo "$(basename "${path%%.ko*}").ko" >>"$initrd/modules/order"
  done
  python3 "$here/dmar.py" >"$initrd-acpi/kernel/firmware/acpi/dmar.aml"
  (cd "$initrd-acpi" && find . | cpio --quiet -o -H newc)
  (cd "$initrd" && find . | cpio --quiet -o -H newc | gzip -1)
}

make_image() {
  local wanted work release
  release=$(cat "$out/kernel/release")
  wanted=$(cat "$0" "$here"/guest/* "$here/dmar.py" "$out/.root.stamp" "$out/kernel/release" "$out/programs/agent" | sha256sum)
  is_fresh image "$wanted" && return
  echo "making the image for $release"
  work=$out/image-tree
  rm -rf "$work"
  mkdir "$work"
  mkdir "$work/tree"
  make_tree "$work/tree" "$release"
  mkfs.erofs --quiet -T0 "$out/image.erofs" "$work/tree" >/dev/null
  make_initrd "$work/tree" "$release" "$work/initrd" >"$out/initrd"
  rm -rf "$work"
  set_fresh image "$wanted"
}

exec 9>"$out/.image.lock"
flock 9
make_root
[ $# = 2 ] || make_image

#!/bin/bash
# Downloads and builds the parts of the test guest: QEMU, a Linux kernel and an initramfs.
#
# Packages come from the Debian mirror that this machine already uses, and are unpacked under
# PENSTOCK_VM_DIR (default: build/vm). Nothing is installed, so root is not needed and the machine does
# not change. A second run does only what is missing; `rm -rf build/vm` starts from scratch.
#
# Exit codes: 0 ready, 77 not available on this machine (with the reason), 1 failure.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
vm_dir=${PENSTOCK_VM_DIR:-$here/../../build/vm}

# QEMU comes from backports, because Debian 12's version (7.2) crashes in about one boot of four.
# kmod resolves the load order of modules. busybox is the guest's user space until the host's file
# system is mounted, and packs the initramfs. dmsetup makes the guest's disks fail.
readonly TOOL_PACKAGES=(
  qemu-system-x86 qemu-system-common qemu-system-data seabios busybox-static kmod dmsetup
)
# Modules for the console, for the host's file system, for the CXL device, and for disks and the
# device-mapper targets that make them fail.
readonly GUEST_MODULES=(
  virtio_pci virtio_console
  9pnet_virtio 9p overlay
  cxl_acpi cxl_pci cxl_mem cxl_port dax_cxl kmem
  nvme dm-mod dm-flakey dm-delay
)

not_available() {
  echo "vm setup: not available here: $*" >&2
  exit 77
}

broken() {
  echo "vm setup: failed: $*" >&2
  exit 1
}

release_codename() {
  # shellcheck source=/dev/null
  (. /etc/os-release 2>/dev/null && [[ ${ID:-} == debian ]] && echo "${VERSION_CODENAME:-}") || true
}

# Prints the mirror of this release, independent of the file and format of the configuration.
configured_mirror() { # CODENAME
  # shellcheck disable=SC2016  # apt expands these names, not the shell
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(CODENAME)' 'Created-By: Packages' |
    awk -v release="$1" '$2 == release || $3 == release { print $1; exit }'
}

# Configures apt with separate package lists for the release and its backports, so that the machine's
# own lists stay unchanged.
write_apt_config() { # MIRROR CODENAME
  mkdir -p "$vm_dir"/apt/{lists,cache/archives}/partial
  cat > "$vm_dir/apt/debian.sources" <<END
Types: deb
URIs: $1
Suites: $2 $2-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
  cat > "$vm_dir/apt/apt.conf" <<END
Dir::Etc::sourcelist "$vm_dir/apt/debian.sources";
Dir::Etc::sourceparts "-";
Dir::State::lists "$vm_dir/apt/lists";
Dir::Cache "$vm_dir/apt/cache";
APT::Sandbox::User "root"; // otherwise apt, as root, switches to a user without write access here
APT::Update::Error-Mode "any"; // otherwise an unreachable mirror is only a warning
END
}

prepare_apt() {
  local codename mirror problem
  [[ $(uname -m) == x86_64 ]] || not_available "the guest needs an x86_64 host, and this is $(uname -m)"
  codename=$(release_codename)
  [[ -n $codename ]] || not_available "the packages need a Debian host, and this is none"
  mirror=$(configured_mirror "$codename")
  [[ -n $mirror ]] || not_available "the apt sources have no mirror for Debian $codename"
  write_apt_config "$mirror" "$codename"
  problem=$(apt-get -c "$vm_dir/apt/apt.conf" -qq update 2>&1) ||
    not_available "cannot reach Debian $codename and its backports: ${problem%%$'\n'*}"
  backports=$codename-backports
}

# Prints the packages that installing PACKAGE... would add to this machine.
missing_packages() { # PACKAGE...
  apt-get -c "$vm_dir/apt/apt.conf" -qq --simulate -o Debug::NoLocking=true \
    install --no-install-recommends --target-release "$backports" "$@" |
    awk '$1 == "Inst" { print $2 }'
}

# Unpacks into a staging directory and renames it at the end, so that the next run ignores an
# interrupted download.
unpack_packages() { # DIRECTORY PACKAGE...
  local target=$1 staging=$vm_dir/staging package
  shift
  rm -rf "$staging"
  mkdir -p "$staging"/{packages,root/usr/{bin,sbin,lib}}
  # Some packages still ship /lib and /sbin: merge them into /usr.
  ln -s usr/bin usr/sbin usr/lib "$staging/root/"
  (cd "$staging/packages" &&
    apt-get -c "$vm_dir/apt/apt.conf" -qq --target-release "$backports" download "$@") >&2
  for package in "$staging"/packages/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
      tar --extract --keep-directory-symlink --no-same-owner --directory "$staging/root"
  done
  mv "$staging/root" "$target"
  rm -rf "$staging"
}

fetch_tools() {
  local missing packages
  missing=$(missing_packages "${TOOL_PACKAGES[@]}") || broken "apt cannot resolve the packages of QEMU"
  # Include packages that the machine has: its versions may be older, or may be removed later.
  mapfile -t packages < <(printf '%s\n' "${TOOL_PACKAGES[@]}" "$missing" | sort --unique)
  rm -rf "$vm_dir/tools"
  unpack_packages "$vm_dir/tools" "${packages[@]}"
  echo "${TOOL_PACKAGES[*]}" > "$vm_dir/tools/packages"
}

# A directory from an earlier version of this script may lack a tool.
tools_are_current() {
  [[ $(cat "$vm_dir/tools/packages" 2> /dev/null) == "${TOOL_PACKAGES[*]}" ]]
}

fetch_kernel() {
  local missing packages
  missing=$(missing_packages linux-image-amd64) || broken "apt cannot resolve the packages of the kernel"
  # linux-image-amd64 is empty and depends on the current image; the other packages are only for installing it.
  mapfile -t packages < <(grep '^linux-' <<< "$missing")
  rm -rf "$vm_dir/kernel.new"
  unpack_packages "$vm_dir/kernel.new" "${packages[@]}"
  (cd "$vm_dir/kernel.new" && ln -s "$(find . -name 'vmlinuz*' -type f -print -quit)" vmlinuz)
  run_kmod_as depmod --basedir "$vm_dir/kernel.new" "$(kernel_release "$vm_dir/kernel.new")"
  mv "$vm_dir/kernel.new" "$vm_dir/kernel"
}

kernel_release() { # UNPACKED_KERNEL
  basename "$1"/usr/lib/modules/*
}

# kmod acts as depmod, modprobe and so on, depending on the name it is called with. The package's links
# to it are absolute and would leave the unpacked tree.
run_kmod_as() { # NAME ARGUMENT...
  (export LD_LIBRARY_PATH=$vm_dir/tools/usr/lib/x86_64-linux-gnu
    exec -a "$1" "$vm_dir/tools/usr/bin/kmod" "${@:2}")
}

module_files_in_load_order() {
  local module
  for module in "${GUEST_MODULES[@]}"; do
    run_kmod_as modprobe --dirname "$vm_dir/kernel" \
      --set-version "$(kernel_release "$vm_dir/kernel")" --show-depends "$module" || exit 1
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }'
}

build_initramfs() {
  local root=$vm_dir/initramfs busybox=$vm_dir/tools/usr/bin/busybox file name
  rm -rf "$root"
  mkdir -p "$root"/{bin,dev,proc,sys,control,host,overlay,newroot,modules}
  cp "$busybox" "$root/bin/"
  install -m 755 "$here/guest-init.sh" "$root/init"
  install -m 755 "$here/guest-cxl.sh" "$root/bin/guest-cxl"
  module_files_in_load_order > "$vm_dir/module-files" || broken "the kernel lacks a guest module"
  while read -r file; do
    name=$(basename "${file%.xz}")
    case $file in
      *.xz) "$busybox" unxz -c "$file" > "$root/modules/$name" ;;
      *) cp "$file" "$root/modules/$name" ;;
    esac
    echo "$name" >> "$root/modules/load-order"
  done < "$vm_dir/module-files"
  (cd "$root" && find . | "$busybox" cpio --quiet -o -H newc | gzip -1) > "$vm_dir/initramfs.gz.new"
  mv "$vm_dir/initramfs.gz.new" "$vm_dir/initramfs.gz"
}

initramfs_is_current() {
  local input
  for input in "$here"/{setup,guest-init,guest-cxl}.sh "$vm_dir"/{tools,kernel}; do
    [[ $vm_dir/initramfs.gz -nt $input ]] || return 1
  done
}

main() {
  mkdir -p "$vm_dir"
  vm_dir=$(cd "$vm_dir" && pwd -P)
  exec 9> "$vm_dir/lock"
  flock 9 # if two launchers start concurrently, the second waits and finds the work done
  if ! tools_are_current || [[ ! -d $vm_dir/kernel ]]; then
    prepare_apt
    tools_are_current || fetch_tools
    [[ -d $vm_dir/kernel ]] || fetch_kernel
  fi
  initramfs_is_current || build_initramfs
}

main

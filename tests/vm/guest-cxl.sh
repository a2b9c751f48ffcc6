#!/bin/busybox sh
# shellcheck shell=dash
#
# Turns the guest's CXL type-3 device into a NUMA node, using only sysfs.
#
# This is what `cxl create-region` does on a real machine: it creates a region over the whole device,
# commits it and binds it. The kernel's dax_cxl and kmem drivers then add a node.
set -e

decoders=/sys/bus/cxl/devices
root_decoder=$decoders/decoder0.0

wait_until() { # WHAT COMMAND...: try five times a second, for at most twenty seconds
  what=$1
  shift
  for _ in $(seq 100); do
    if "$@"; then return 0; fi
    sleep 0.2
  done
  echo "guest-cxl: $what did not appear" >&2
  return 1
}

find_endpoint_decoder() {
  for decoder in "$decoders"/decoder*; do
    if [ "$(cat "$decoder/devtype")" = cxl_decoder_endpoint ]; then
      endpoint_decoder=$(basename "$decoder")
      return 0
    fi
  done
  return 1
}

create_region() {
  region=$(cat $root_decoder/create_ram_region)
  nbytes=$(($(cat $decoders/mem0/ram/size)))
  echo "$region" > $root_decoder/create_ram_region
  cat $root_decoder/interleave_granularity > "$decoders/$region/interleave_granularity"
  echo 1 > "$decoders/$region/interleave_ways"
  echo $nbytes > "$decoders/$region/size"
  echo ram > "$decoders/$endpoint_decoder/mode"
  echo $nbytes > "$decoders/$endpoint_decoder/dpa_size"
  echo "$endpoint_decoder" > "$decoders/$region/target0"
  echo 1 > "$decoders/$region/commit"
  echo "$region" > /sys/bus/cxl/drivers/cxl_region/bind
}

node_has_memory() {
  [ -e /sys/bus/dax/devices/dax0.0/target_node ] || return 1
  node=$(cat /sys/bus/dax/devices/dax0.0/target_node)
  [ "$(awk '/MemTotal/ { print $4 }' "/sys/devices/system/node/node$node/meminfo")" -gt 0 ]
}

wait_until "the device's decoder" find_endpoint_decoder
create_region
wait_until "the device's NUMA node" node_has_memory 2> /dev/null

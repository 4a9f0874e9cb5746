#!/usr/bin/env bash
# Starts a Ray node with labels that name its place in the network, or prints the command that would start it.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: label_nodes.sh [--run] (--head | --address HOST:PORT) LABELS [-- RAY_START_OPTION...]

Prints the `ray start` command of a node with its place in the network; with --run, runs it.

LABELS, one or more, from the widest to the narrowest:
  --dc NAME        data centre       tandem.io/dc
  --cluster NAME   cluster           tandem.io/cluster
  --s2 NAME        S2 switch         tandem.io/s2
  --s1 NAME        S1 switch         tandem.io/s1
  --s0 NAME        S0 switch         tandem.io/s0
A NAME has at most 63 letters, digits, '-', '_' or '.', and begins and ends with a letter or digit. If a switch name
exists twice, give the wider label too, and select by both.

Options:
  --head               this is the head node
  --address HOST:PORT  the head node to join
  --run                run the command instead of printing it
  -h, --help           this text
  -- OPTION...         passed to `ray start` as they are

Example:
  label_nodes.sh --address 10.0.0.1:6379 --dc dc1 --cluster c1 --s2 spine-1 --s1 switch-a --s0 tor-7 -- --num-cpus=64

On Kubernetes KubeRay starts the nodes: the rendered RayService has these labels in its worker groups.
TEXT
}

fail() {
  printf 'label_nodes.sh: %s (--help shows the usage)\n' "$1" >&2
  exit 2
}

name_pattern='^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$'
address_pattern='^[A-Za-z0-9._-]+:[0-9]{1,5}$'
run=false
head=false
address=''
labels=''
extra=()

add_label() {
  local key="tandem.io/$1" value="$2"
  [[ $value =~ $name_pattern ]] || fail "--$1: '$value' is no label value; use 1 to 63 letters, digits, '-', '_' or '.'"
  [[ ",$labels" != *",$key="* ]] || fail "--$1 is given twice; a node has one"
  labels+="${labels:+,}$key=$value"
}

while (($#)); do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --run) run=true ;;
    --head) head=true ;;
    --)
      shift
      extra=("$@")
      break
      ;;
    --address | --dc | --cluster | --s2 | --s1 | --s0)
      (($# >= 2)) || fail "$1 needs a value"
      if [[ $1 == --address ]]; then
        [[ $2 =~ $address_pattern ]] || fail "--address: '$2' is not HOST:PORT"
        address=$2
      else
        add_label "${1#--}" "$2"
      fi
      shift
      ;;
    *) fail "unknown argument '$1'" ;;
  esac
  shift
done

[[ -n $labels ]] || fail 'no label given; name at least one of --dc, --cluster, --s2, --s1, --s0'
if $head; then
  [[ -z $address ]] || fail '--head and --address exclude each other'
  command=(ray start --head "--labels=$labels")
else
  [[ -n $address ]] || fail 'give --head, or --address HOST:PORT of the head node'
  command=(ray start "--address=$address" "--labels=$labels")
fi
command+=(${extra[@]+"${extra[@]}"})

if $run; then
  command -v ray >/dev/null || fail "'ray' is not on the PATH; activate the environment that has it"
  exec "${command[@]}"
fi
printf '%q ' "${command[@]}" | sed 's/ $//'
printf '\n'

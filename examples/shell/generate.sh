#!/usr/bin/env bash
# ./generate.sh '3 + 4 =' [host:port] [queue] [n]     submits a job through the inbox and prints its text as it comes,
#                                                     and the texts of further candidates at the end
#
# Needs bash alone: the few lines of RESP below stand in for redis-cli. With it, the whole of it is two commands:
#   redis-cli XADD 'millrace:{default}:inbox' '*' job '{"id":"a1","prompt":"3 + 4 =","stream":true}'
#   redis-cli XREAD BLOCK 0 STREAMS 'millrace:{default}:result:a1' 0
set -euo pipefail
LC_ALL=C # lengths are in bytes

prompt=${1:?usage: generate.sh PROMPT [HOST:PORT] [QUEUE] [N]}
place=${2:-localhost:6379}
prefix="millrace:{${3:-default}}:"
id="sh-$(date +%s)-$$"

# Sends one command; `reply` then holds the strings of its answer, however they are nested.
redis() {
    printf '*%d\r\n' $# >&3
    local word
    for word in "$@"; do printf '$%d\r\n%s\r\n' ${#word} "$word" >&3; done
    reply=()
    read_reply
}

read_reply() {
    local head text i
    IFS= read -r head <&3
    head=${head%$'\r'}
    case $head in
        -*) echo "${head#-}" >&2; exit 1 ;;
        '$-1' | '*-1') ;;
        '$'*)
            text=
            ((${head#?} == 0)) || IFS= read -r -N "${head#?}" text <&3
            IFS= read -r _ <&3
            reply+=("$text")
            ;;
        '*'*) for ((i = 0; i < ${head#?}; i++)); do read_reply; done ;;
        *) reply+=("${head#?}") ;;
    esac
}

json_string() {
    local text=${1//\\/\\\\} code hex character
    text=${text//\"/\\\"}
    for code in {1..31}; do # the control characters
        printf -v hex '%02x' "$code"
        printf -v character "\\x$hex"
        text=${text//"$character"/\\u00$hex}
    done
    printf '"%s"' "$text"
}

{ exec 3<>"/dev/tcp/${place%:*}/${place##*:}"; } 2>/dev/null || { echo "no Redis answers at $place" >&2; exit 1; }
redis XADD "${prefix}inbox" '*' job "{\"id\":\"$id\",\"prompt\":$(json_string "$prompt"),\"max_tokens\":32,\"n\":${4:-1},\"stream\":true}"
echo "job $id" >&2

# An entry is its id, then names and values. An event has 4 of them, the text last, and with several candidates its index;
# the terminal entry begins with `state`.
after=0 state= texts=()
while [[ -z $state ]]; do
    redis XREAD COUNT 1 BLOCK 5000 STREAMS "${prefix}result:$id" "$after"
    ((${#reply[@]})) || continue
    after=${reply[1]}
    case ${reply[2]} in
        offset)
            index=${reply[11]:-0}
            if ((index)); then texts[index]+=${reply[9]}; else printf '%s' "${reply[9]}"; fi
            ;;
        state)
            state=${reply[3]}
            for ((i = 2; i < ${#reply[@]}; i += 2)); do
                [[ ${reply[i]} != error ]] || echo "${reply[i + 1]}" >&2
            done
            ;;
    esac
done
printf '\n'
for index in "${!texts[@]}"; do printf -- '--- candidate %d\n%s\n' "$index" "${texts[index]}"; done
echo "$state" >&2
[[ $state == finished ]]

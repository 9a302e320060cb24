#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""reshape_headers.py IN OUT shorter|longer: the public headers as an older or a newer version would have them: every struct that
begins with struct_bytes has lost its last fields, or has got one more."""
import os, re, sys

# How many fields an older version lacks. 0: the last field is one without which nothing works.
CUT = {"ep_tensor": None, "ep_client_config": 2, "ep_layer_desc": 5, "ep_model_desc": 1, "ep_moe_args": 9, "ep_moe_result": 9, "ep_client_stats": 2,
       "ep_client_node_waits": 1, "ep_client_node_memory": 0, "ep_gate_load": 1, "ep_gate_config": 4, "ep_group_config": 2, "ep_group_stats": 1, "ep_group_traffic": 1,
       "ep_group_params": 2, "ep_group_buffers": 1, "ep_moe_dispatch_args": 4, "ep_moe_combine_args": 2, "ep_moe_add_rms_norm": 1, "ep_permute_config": 2,
       "ep_permute_in": 1, "ep_permute_out": 2, "ep_unpermute_args": 0}


def reshape(match, how, seen):
    body, name = match.groups()
    fields = [f for f in re.sub(r"/\*.*?\*/", "", body, flags=re.S).split(";") if f.strip()]
    if fields[0].strip() != "uint32_t struct_bytes":
        return match.group()
    seen.add(name)
    cut = CUT[name]
    if cut is None: # stands inside other structs: its size is fixed
        return match.group()
    fields = fields[: len(fields) - cut] if how == "shorter" else [*fields, "\n    uint64_t later[3]"]
    return f"typedef struct {name} {{" + "".join(f + ";" for f in fields) + f"\n}} {name};"


def main():
    source, target, how = sys.argv[1:]
    os.makedirs(target + "/expertd", exist_ok=True)
    seen = set()
    for name in sorted(os.listdir(source + "/expertd")):
        text = open(f"{source}/expertd/{name}").read()
        text = re.sub(r"typedef struct \w+ \{(.*?)\n\} (\w+);", lambda m: reshape(m, how, seen), text, flags=re.S)
        with open(f"{target}/expertd/{name}", "w") as file:
            file.write(text)
    assert seen == set(CUT), f"structs with struct_bytes that CUT does not know, or that are gone: {seen ^ set(CUT)}"


if __name__ == "__main__":
    main()

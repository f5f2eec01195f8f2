// SPDX-License-Identifier: MIT
// Exact sums: of what a row's choices stand for, along the binary tree over the expert ids whose
// node of level l is shared by the ids that are equal but for their lowest l bits. What is absent
// is skipped, so the sum of a part of the experts that is a subtree is a node of the sum of all of
// them, whoever works it out. A node is the sum of its lower and its upper half, in f32, never part
// of a fused operation. Choices of the same expert: in ascending order.
//   Kernels define before: uint `tree`, a constant, the number of choices or 0 where the kernel sums
//   otherwise; int leaf_row(uint slot), -1 for none; uint leaf_expert(uint slot), below 2^26; float
//   leaf_weight(uint slot); Elements leaf(int row, uint unit).
#ifndef BELLOWS_TREE_SUMS_GLSL
#define BELLOWS_TREE_SUMS_GLSL

const uint kMostLeaves = tree > 0u ? tree : 1u;

// Arrays whose length is a specialization constant can be neither assigned nor handed over.
uint num_leaves, leaf_keys[kMostLeaves]; // ascending: expert and choice
Elements pending[kMostLeaves]; // nodes whose sibling is still to come, the largest first
uint parts[kMostLeaves];       // the level of the node that pending[i] and pending[i + 1] share

// Takes choices first .. first + tree for the sums that follow.
void take_leaves(uint first) {
    num_leaves = 0u;
    FOR_COUNTED(k, 0u, tree) {
        if (leaf_row(first + k) >= 0) {
            uint key = (leaf_expert(first + k) << 6) + k, at = num_leaves;
            while (at > 0u && leaf_keys[at - 1u] > key) {
                leaf_keys[at] = leaf_keys[at - 1u];
                --at;
            }
            leaf_keys[at] = key;
            ++num_leaves;
        }
    } NEXT_COUNTED(k, tree, 1u);
}

Elements both(Elements a, Elements b) {
    precise vec4 low = a.low + b.low;
    precise vec4 high = a.high + b.high;
    return Elements(low, high);
}

// Of unit `unit`; first: as taken.
Elements tree_sum(uint first, uint unit) {
    uint depth = 0u, i = 0u;
    if (num_leaves == 0u) {
        return Elements(vec4(0), vec4(0));
    }
    do {
        uint slot = first + (leaf_keys[i] & 63u);
        if (i > 0u) {
            // 0 for the same expert: findMSB(0) is -1.
            uint level = uint(findMSB((leaf_keys[i - 1u] >> 6) ^ (leaf_keys[i] >> 6)) + 1);
            while (depth > 1u && parts[depth - 2u] <= level) {
                pending[depth - 2u] = both(pending[depth - 2u], pending[depth - 1u]);
                --depth;
            }
            parts[depth - 1u] = level;
        }
        Elements e = leaf(leaf_row(slot), unit);
        float weight = leaf_weight(slot);
        precise vec4 low = weight * e.low;
        precise vec4 high = weight * e.high;
        pending[depth] = Elements(low, high);
        ++depth;
    } while (++i < num_leaves);
    while (depth > 1u) {
        pending[depth - 2u] = both(pending[depth - 2u], pending[depth - 1u]);
        --depth;
    }
    return pending[0];
}

#endif

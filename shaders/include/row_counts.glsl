// SPDX-License-Identifier: MIT
// Which rows of a tensor are there. The kernel has `rows` and `rows_per_count` in its push block, and the
// operand row_count: of each rows_per_count rows the first row_count[i] are there, of which one count may
// serve all rows; 0: all rows are there, and row_count is any memory of a word for each row.
#ifndef BELLOWS_ROW_COUNTS_GLSL
#define BELLOWS_ROW_COUNTS_GLSL

// Rows from the result on are not there.
uint end_of_rows() {
    return push.rows_per_count >= push.rows ? min(push.rows, push.operands.row_count.v[0])
                                            : push.rows;
}

// The count that is read is one that exists even where it is not needed: CPU drivers may read it.
bool row_is_there(uint row) {
    uint per_count = max(push.rows_per_count, 1u);
    return push.rows_per_count == 0u || push.rows_per_count >= push.rows ||
           row % per_count < push.operands.row_count.v[row / per_count];
}

#endif

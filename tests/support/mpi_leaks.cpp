// SPDX-License-Identifier: MIT
// For test programs whose ranks use MPI: it unloads modules, after which their leaks cannot be told
// from ours by name, and survivors of a lost rank end without MPI_Finalize. Leaks are looked for by
// the tests of one rank.

#ifdef __SANITIZE_ADDRESS__
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0";
}
#endif

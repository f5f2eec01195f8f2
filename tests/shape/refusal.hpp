// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <string>

namespace bellows {

/// The message of the Error{InvalidArgument} that a call throws; empty if it throws none.
template <class Call>
std::string refusal(Call call) {
    try {
        call();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.message();
        return error.message();
    }
    return "";
}

} // namespace bellows

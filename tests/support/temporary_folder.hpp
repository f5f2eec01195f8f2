// SPDX-License-Identifier: MIT
#pragma once

// Helpers of the command's tests: a folder of its own for each test, and the check that an
// expression throws the right `Error` with a message of one line that says what was wrong.

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

namespace bellows {

/// A fresh folder, removed with everything in it.
class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "bellows-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) {
            throw std::runtime_error("cannot make a temporary folder");
        }
        path_ = std::filesystem::canonical(name);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    const std::filesystem::path& path() const { return path_; }

    std::filesystem::path write(const std::string& name, std::string_view content) const {
        const std::filesystem::path file = path_ / name;
        std::filesystem::create_directories(file.parent_path());
        std::ofstream(file, std::ios::binary) << content;
        return file;
    }

private:
    std::filesystem::path path_;
};

inline std::string content_of(const std::filesystem::path& path) {
    const std::ifstream file(path, std::ios::binary);
    std::ostringstream text; // where a read fails, it ends the text; an iterator would throw
    text << file.rdbuf();
    return text.str();
}

inline void expect_error(const Error& error, ErrorCode code, std::string_view part) {
    EXPECT_EQ(error.code(), code) << to_string(error.code()) << ": " << error.message();
    EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    EXPECT_EQ(error.message().find('\n'), std::string::npos) << error.message();
}

} // namespace bellows

/// The expression throws bellows::Error of this code, with `part` in its one-line message.
#define EXPECT_BELLOWS_ERROR(expression, error_code, part)                                         \
    do {                                                                                           \
        try {                                                                                      \
            (void)(expression);                                                                    \
            ADD_FAILURE() << #expression " threw nothing";                                         \
        } catch (const ::bellows::Error& caught) {                                                 \
            SCOPED_TRACE(#expression);                                                             \
            ::bellows::expect_error(caught, ::bellows::ErrorCode::error_code, part);               \
        }                                                                                          \
    } while (false)

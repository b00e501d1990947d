// Tests of rejections: the code and a part of the message.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>

#include "shoal/base/error.h"

namespace shoal::testkit {

// Fails unless body() throws shoal::Error of `code` whose message contains `part` and is one line.
template <class Body>
void expect_error(ErrorCode code, std::string_view part, Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(to_string(error.code()), to_string(code)) << message;
    EXPECT_NE(message.find(part), std::string::npos) << "message: " << message << "\nexpected in it: " << part;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return;
  }
  ADD_FAILURE() << "no error, expected one with: " << part;
}

}  // namespace shoal::testkit

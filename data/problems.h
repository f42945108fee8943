// problems.h: what can be wrong with inputs. Whatever is broken is counted and named by file and line, never passed on and never silent.
#pragma once

#include <optional>

#include "llmc/base.h"

enum class Problem {
    bad_json,
    no_text_key,
    text_not_string,
    too_long,
    no_text,
    utf16_file,
    empty_file,
    bad_signals,
    cut_file,
    wrong_checksum,
    grown_file,
    no_signals,
    invalid_utf8,
    lone_surrogate,
    COUNT
};
struct ProblemKind {
    const char* name;  // as PREFIX.json counts it
    bool skips;        // the document; false: it is kept, repaired as the report says
};
constexpr ProblemKind PROBLEM_KINDS[] = {
    {"lines_not_json", true},
    {"lines_without_text_key", true},
    {"text_not_a_string", true},
    {"documents_too_long", true},
    {"documents_without_text", true},
    {"files_in_utf16", true},
    {"files_empty", true},
    {"lines_of_signals_broken", false},
    {"files_cut", false},
    {"files_with_a_wrong_checksum", false},
    {"files_that_grew", false},
    {"files_without_signals", false},
    {"documents_with_invalid_utf8", false},
    {"documents_with_lone_surrogates", false},
};
static_assert(std::size(PROBLEM_KINDS) == (size_t)Problem::COUNT);

struct ProblemReport {
    Problem problem;
    std::string where_and_what;
};

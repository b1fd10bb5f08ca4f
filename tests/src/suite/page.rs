//! The page that lists the clauses.

use std::fmt::Write as _;

use super::clauses::GROUPS;

/// The text of `docs/conformance.md`: what every clause demands, and which saboteurs it finds out.
#[must_use]
pub fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    for group in GROUPS {
        let _ = write!(page, "\n## {}\n\n{}\n\n", group.title, group.about);
        page.push_str("| clause | what must hold | point of the contract | saboteurs |\n");
        page.push_str("|---|---|---|---|\n");
        for clause in group.clauses {
            let saboteurs: Vec<_> =
                clause.saboteurs.iter().map(|name| format!("`{name}`")).collect();
            let _ = writeln!(
                page,
                "| `{}` | {} | {} | {} |",
                clause.name,
                clause.about,
                clause.point,
                saboteurs.join(", ")
            );
        }
    }
    page
}

const INTRODUCTION: &str = "\
# Conformance

What the conformance kit (`kvx_tests::suite`) holds every backend to. This page is written by the kit itself: a test
compares it with the clauses in the code (`KVX_BLESS=1 cargo test -p kvx-tests --test conformance_page` writes it anew).

Each clause is a test for every setup of a backend and every place: both sides in one process, in two processes, in two
network namespaces. A clause that the backend's capabilities do not reach is ignored, with the reason. Every clause fails on
its saboteurs: backends with one deliberate fault each (`tests/tests/saboteurs`).
";

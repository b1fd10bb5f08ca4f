//! `docs/conformance.md` says what the clauses in the code say.

use std::path::Path;

use kvx_tests::suite;

#[test]
fn the_page_lists_the_clauses_as_they_are() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/conformance.md");
    let page = suite::page();
    if std::env::var_os("KVX_BLESS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/conformance.md is out of date; KVX_BLESS=1 cargo test -p kvx-tests --test conformance_page writes it anew"
    );
}

#[test]
fn names_are_unique_and_sorted_into_groups() {
    let mut names: Vec<_> = suite::clauses().map(|clause| clause.name()).collect();
    assert!(names.iter().all(|name| name.contains('.') && !name.contains("::")));
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

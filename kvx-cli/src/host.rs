//! What the system says of itself in files, below a directory that tests may choose.

use std::fs;
use std::path::{Path, PathBuf};

/// A host, as `/proc`, `/sys` and `/dev` below a directory have it.
#[derive(Debug)]
pub(crate) struct Host {
    root: PathBuf,
}

impl Host {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file's text, without blanks around it; `None` where it cannot be read.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        Some(fs::read_to_string(self.path(path)).ok()?.trim().to_owned())
    }

    pub(crate) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Names in a directory, sorted; none where there is no such directory.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }

    /// A limit of this process, as `/proc/self/limits` has it: `None` where it does not say, `Some(None)` where there is none.
    pub(crate) fn limit(&self, name: &str) -> Option<Option<u64>> {
        let text = self.text("/proc/self/limits")?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        match line.split_whitespace().next()? {
            "unlimited" => Some(None),
            number => number.parse().ok().map(Some),
        }
    }

    /// Whether this process has a capability of the kernel's, by its number.
    pub(crate) fn has_capability(&self, number: u32) -> bool {
        let status = self.text("/proc/self/status").unwrap_or_default();
        let bits = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let bits = bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok());
        bits.is_some_and(|bits| bits >> number & 1 == 1)
    }

    /// Directories of this process's control group and of those around it, for a controller: of version 2, then of version 1.
    /// Inside of a container its own group is the root of what is mounted, whatever name it has outside.
    pub(crate) fn cgroups(&self, controller: &str) -> [Vec<String>; 2] {
        let text = self.text("/proc/self/cgroup").unwrap_or_default();
        let group = |is: &dyn Fn(&str) -> bool| {
            let mut fields = text.lines().map(|line| line.splitn(3, ':'));
            fields.find_map(|mut fields| {
                let (_, names, path) = (fields.next()?, fields.next()?, fields.next()?);
                is(names).then(|| path.trim_end_matches('/').to_owned())
            })
        };
        let all = |below: &str, path: Option<String>| -> Vec<String> {
            let Some(path) = path else { return Vec::new() };
            let around = std::iter::successors(Some(&*path), |path| Some(path.rsplit_once('/')?.0));
            around.map(|path| format!("{below}{path}")).collect()
        };
        [
            all("/sys/fs/cgroup", group(&|names| names.is_empty())),
            all(
                &format!("/sys/fs/cgroup/{controller}"),
                group(&|names| names.split(',').any(|name| name == controller)),
            ),
        ]
    }

    /// What a controller of this process's control group says: in version 2, or in version 1 under another name.
    pub(crate) fn cgroup(&self, controller: &str, two: &str, one: &str) -> Option<String> {
        let versions = self.cgroups(controller).into_iter().zip([two, one]);
        let mut files = versions
            .flat_map(|(groups, file)| groups.into_iter().map(move |at| format!("{at}/{file}")));
        files.find_map(|file| self.text(&file))
    }
}

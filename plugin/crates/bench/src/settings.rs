//! `evenkeel-bench settings`: the plugin's settings, from the table that the plugin itself reads
//! them by.

use std::fmt::Write as _;

use clap::Args;
use evenkeel_transport::Settings;
use evenkeel_transport::settings::SETTINGS;
use evenkeel_transport::settings::table::{Audience, Variable};

use crate::error::Result;
use crate::output;

/// How to show them.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  evenkeel-bench settings
  EVENKEEL_FLOWS=8 evenkeel-bench settings --check")]
pub(crate) struct Options {
    /// Print the page of the documentation
    #[arg(long, conflicts_with = "check")]
    markdown: bool,
    /// Say whether the environment's values are valid, and nothing else
    #[arg(long)]
    check: bool,
}

/// Prints the settings, or checks them.
///
/// # Errors
/// Names the first variable of the environment whose value the plugin would refuse.
pub(crate) fn run(options: &Options) -> Result<()> {
    let text = if options.check {
        Settings::from_env().map_err(|error| error.to_string())?;
        evenkeel_reduction::Settings::from_env().map_err(|error| error.to_string())?;
        evenkeel_tuner::Settings::from_env().map_err(|error| error.to_string())?;
        "all settings of the environment are valid\n".to_owned()
    } else if options.markdown {
        markdown()
    } else {
        plain(|name| std::env::var(name).ok())
    };
    output::write(&text)
}

/// The variables of all tables.
fn variables() -> impl Iterator<Item = Variable> {
    let reduction = evenkeel_reduction::SETTINGS.iter().map(|setting| setting.variable);
    let report = evenkeel_transport::report::SETTINGS.iter().map(|setting| setting.variable);
    let tuner = evenkeel_tuner::SETTINGS.iter().map(|setting| setting.variable);
    SETTINGS.iter().map(|setting| setting.variable).chain(report).chain(reduction).chain(tuner)
}

fn plain(value: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    for setting in variables() {
        let default = if setting.default.is_empty() { "unset" } else { setting.default };
        let now = match value(setting.name) {
            None => String::new(),
            Some(_) if setting.is_secret() => ", set here".to_owned(),
            Some(value) => format!(", here {value:?}"),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{} (default {default}{now})", setting.name);
        let _ = writeln!(text, "    {}", setting.meaning);
        let _ = writeln!(text, "    takes {}", setting.accepts);
    }
    text
}

/// The sections of the page: heading, introduction, and which variables they hold.
type Section = (&'static str, &'static str, fn(&Variable) -> bool);

const SECTIONS: [Section; 4] = [
    ("Your settings", "", |it| it.audience == Audience::User && !is_of_nccl(it)),
    ("Variables of NCCL", "Evenkeel obeys these as NCCL's own networks do.\n\n", is_of_nccl),
    (
        "Internal",
        "The operator writes these into pods, and `evenkeel-run` writes `EVENKEEL_STATUS_DIR`. They are
not an interface; their names and values may change with any version.\n\n",
        |it| it.audience == Audience::Internal,
    ),
    (
        "Debugging",
        "The defaults suit every job. Use these to compare transports and to look for a fault.\n\n",
        |it| it.audience == Audience::Debug,
    ),
];

fn is_of_nccl(variable: &Variable) -> bool {
    variable.name.starts_with("NCCL_")
}

fn markdown() -> String {
    let mut text = "\
# Settings of the plugin

These are environment variables of the training process. `spec.environment` of a NetworkProfile sets
them for its jobs; a container's own value wins. On a value that is not accepted, the plugin logs a
warning and refuses to start. `evenkeel-bench settings --check` reports such values beforehand.
"
    .to_owned();
    for (heading, introduction, belongs) in SECTIONS {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n## {heading}\n\n{introduction}| Variable | Meaning | Accepted values | Default |\n|---|---|---|---|\n"
        );
        for setting in variables().filter(belongs) {
            let default = if setting.default.is_empty() { "unset" } else { setting.default };
            let cell = |text: &str| text.replace('|', "\\|");
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} |",
                setting.name,
                cell(setting.meaning),
                cell(setting.accepts),
                cell(default)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_page_is_up_to_date() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/settings.md");
        let written = std::fs::read_to_string(page).unwrap_or_default();
        assert!(
            written == markdown(),
            "docs/settings.md is old: cargo run -p evenkeel-bench -- settings --markdown > docs/settings.md"
        );
    }

    #[test]
    fn each_setting_is_in_one_section_and_few_are_for_users() {
        for variable in variables() {
            let sections = SECTIONS.iter().filter(|(_, _, belongs)| belongs(&variable)).count();
            assert_eq!(sections, 1, "{}", variable.name);
        }
        let (_, _, is_for_users) = SECTIONS[0];
        let count = variables().filter(is_for_users).count();
        assert!(count <= 20, "{count} settings are for users");
    }

    #[test]
    fn settings_show_values_of_the_environment() {
        let text = plain(|name| (name == "EVENKEEL_FLOWS").then(|| "8".to_owned()));
        assert!(text.contains("EVENKEEL_FLOWS (default 4, here \"8\")"), "{text}");
    }
}
